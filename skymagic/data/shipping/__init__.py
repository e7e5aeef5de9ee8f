"""Route values to ranks: manifests of runs, bundles of values, and the ranks' bindings.

shipper      the notebook's end: creates the manifest of a run, and rebuilds returned values
collecting   the request of a run, and the pickled values that it needs
comparison   compares the notebook's values with those of the ranks, and detects changes
notes        messages about values, each shown once
unpicklable  why a value cannot be sent: the part that cannot be pickled, and a remedy
bundles      variables that are pickled together, and how they get into a store
packing      groups values into bundles by rank; orders for values of another rank
links        objects from sent values that the ranks still hold
bindings     the manifest of a run, the ranks' bindings of names, and the source of modules
"""
