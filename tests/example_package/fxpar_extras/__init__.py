"""What another package may add to fxpar, one module for each kind."""
