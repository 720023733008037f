"""The commands: the words of each, with examples. The bodies are in `fxpar.cli`, imported when a command runs."""
