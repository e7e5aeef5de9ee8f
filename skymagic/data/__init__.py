"""The data plane: find the names that a cell needs, serialize their values, and move them.

The names of a cell (`capture`) are pickled (`values`), put into content-addressed stores
(`skymagic.content`) and described in a manifest (`shipping`). Each rank maps the values from its
node's store and binds them as the manifest says. Returned values go through a node's store too.

namespace   type of the namespaces that cells run in
capture/    names that a cell needs, and modules that travel as source
values/     serialization of values
bundle      locations of a value's parts: the bundle format, and the content index
shipping/   in the notebook: route values to ranks
"""
