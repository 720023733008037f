"""`fxpar train`: from a configuration file to a trained model on local or cluster ranks."""
