"""Values as bytes and back: pickles with their buffers apart, memory that is shared, mappings; on both sides."""
