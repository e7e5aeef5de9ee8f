"""What moves to which rank: the manifest of a run, bundles of values, and what each rank's names are bound to.

shipper       the notebook's end: makes the manifest of a run
request       what a run asks for, and what is found that it needs
collecting    the values that a run needs, pickled
comparison    the notebook's values beside what the ranks have
notes         what the user is told about them, each thing once
manifest      what one cell needs on the ranks, as a value
bundles       variables that are pickled together, and their way into a store
sequence      in which order values are rebuilt
packing       from values that must travel to bundles, by rank
links         what the ranks hold of values that were sent, object by object
pulled        values that came from the ranks
bindings      what each rank's names are bound to
lent          values of one rank on their way to others
sources       the source of modules that a run needs
unpacking     values on their way back
refusal       why a value cannot travel, and what to do instead
fingerprints  whether a value of the notebook has changed since some rank got it
"""
