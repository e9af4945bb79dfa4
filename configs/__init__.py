"""One YAML file per run; shipped as package data so that a run can be named without a path."""
