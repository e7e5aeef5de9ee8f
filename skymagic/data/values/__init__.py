"""Serialization: pickles with out-of-band buffers, shared memory, and content hashes.

pickling       pickle and unpickle values (protocol 5); list the objects in a pickled value
pickler        cloudpickle with custom handling of functions, classes and memory
pickled        the result of pickling, the fast path for plain values, and shared objects between
               values
reducers       reducers for built-in types that pickle cannot handle; class identity across ranks
singletons     objects that exist once per process: modules, torch operators and constants, settings
enums          enumerations: classes and members, each one object on each side
registrations  registrations of a class with libraries: pytree nodes, names for saving, virtual
               bases
worlds         objects bound to one rank and world size, which are refused
rebuild        functions that pickles call to rebuild functions, classes and other objects
arrays         memory of NumPy arrays and pandas frames; memory-mapped files
tensors        memory of torch tensors
hooks          torch modules, optimizers and tensors with their hooks
parametrized   torch modules with computed parameters: parametrizations, pruning, weight and
               spectral norm
shards         values that are sharded over several ranks, gathered
contents       hash of the contents of a value
forms          contents of arrays, tensors, frames, figures and Keras models
exceptions     exceptions with their causes and contexts
snapshots      containers of many small arrays, compared without pickling them
memory         memory that overlaps and travels as one block
kinds          predicates about types
descriptions   short descriptions of values: types, shapes, checksums
"""
