"""What can be run: a cell, a shell script, a call of a function, joblib's tasks."""

from skymagic.jobs import joblib_backend as joblib_backend  # puts itself where the plugin joblib finds it
