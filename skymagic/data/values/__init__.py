"""Values as bytes and back: pickles with their buffers apart, memory that is shared, mappings; on both sides.

pickling    values as a pickle (protocol 5) and its out-of-band buffers
pickler     cloudpickle, with functions, classes and memory done differently
reducers    Python's own types that pickle cannot take apart
rebuild     what pickles call to make functions, classes and others again
plain       the short way for what Python pickles all by itself
numbered    the objects, storages and classes in a value that was pickled here
pickled     a pickled value, and which values share something
links       objects by their number in a pickle, for values that refer to what was sent before
arrays      the memory of numpy's arrays and pandas' frames
mapped      memory maps of files
tensors     the memory of torch's tensors
shards      values whose parts lie on several ranks, gathered
foreign     the types of ctypes
contents    what a value contains, as one hash
forms       what arrays, tensors, frames, figures and Keras models contain
identity    one class on all ranks
naming      values that have their names before others are rebuilt
exceptions  exceptions with what they follow from
memory      which memory overlaps, and travels as one
rope        pickle streams in pieces, without a copy
kinds       questions about types
descriptions  what values are, in words: types, shapes, checksums
"""
