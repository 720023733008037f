"""What this machine's devices, memory and links sustain, measured, as a cluster file says it."""
