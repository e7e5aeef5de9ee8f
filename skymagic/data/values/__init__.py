"""Values as bytes and back: pickles with their buffers apart, memory that is shared, mappings; on both sides.

pickling    values as a pickle (protocol 5) and its out-of-band buffers, and back; what is in a value that was pickled here
pickler     cloudpickle, with functions, classes and memory done differently
pickled     a pickled value, the short way to one, and which values share something or refer to each other
reducers    Python's own types that pickle cannot take apart; one class on all ranks
singletons  objects of which each process has one of its own: modules, torch's operators and constants, settings
enums       enumerations: classes with their members, each one object on each side
registrations  what libraries know of a class: pytree nodes, names for saving, virtual base classes
worlds      objects that know rank and world size, and do not travel
rebuild     what pickles call to make functions, classes and others again
arrays      the memory of numpy's arrays and pandas' frames; memory maps of files
tensors     the memory of torch's tensors
hooks       torch's modules and optimizers, with their hooks and those of tensors
parametrized  modules of torch whose parameters are computed from others: parametrizations, pruning, weight and spectral norm
shards      values whose parts lie on several ranks, gathered
contents    what a value contains, as one hash
forms       what arrays, tensors, frames, figures and Keras models contain
exceptions  exceptions with what they follow from
memory      which memory overlaps, and travels as one
kinds       questions about types
descriptions  what values are, in words: types, shapes, checksums
"""
