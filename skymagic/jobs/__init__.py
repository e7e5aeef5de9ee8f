"""What can be run: a cell, a shell script, a call of a function, joblib's tasks."""
