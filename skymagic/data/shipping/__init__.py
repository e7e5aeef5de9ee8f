"""What moves to which rank: the manifest of a run, bundles of values, and what each rank's names are bound to."""
