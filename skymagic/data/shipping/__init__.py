"""What moves to which rank: the manifest of a run, bundles of values, and what each rank's names are bound to.

shipper       the notebook's end: makes the manifest of a run, and rebuilds values on their way back
collecting    what a run asks for, and the values that it needs, pickled
comparison    the notebook's values beside what the ranks have, and whether they have changed
notes         what the user is told about them, each thing once; why a value cannot travel
bundles       variables that are pickled together, and their way into a store
packing       from values that must travel to bundles, by rank
links         what the ranks hold of values that were sent, object by object
bindings      the manifest of a run, and what each rank's names are bound to; the source of modules
"""
