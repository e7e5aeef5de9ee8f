"""Values as bytes and back: pickles with their buffers apart, memory that is shared, mappings; on both sides.

pickling    values as a pickle (protocol 5) and its out-of-band buffers
rebuild     what pickles call to make functions, classes and others again
pickled     a pickled value, and which values share something
arrays      the memory of numpy's arrays and pandas' frames
tensors     the memory of torch's tensors
foreign     the types of ctypes
contents    what a value contains, as one hash
forms       what arrays, tensors, frames, figures and Keras models contain
naming      values that have their names before others are rebuilt
exceptions  exceptions with what they follow from
memory      which memory overlaps, and travels as one
rope        pickle streams in pieces, without a copy
kinds       questions about types
"""
