"""Models, training, sampling, planning and the command line."""
