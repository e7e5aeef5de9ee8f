"""A rank: an ipykernel whose namespace, output and errors the notebook sees as its own.

entry           what a forked process does to become a rank
context         the state that kernel, shell and scripts share
kernel          the kernel: carries out orders, between interrupts
interrupts      what SIGINT does: it falls into cells alone
shell           IPython's shell: displays go by way of the agent, errors are returned
namespace       the rank's variables: values are bound, and packed for the way back
lending         the rank's own values, packed for other ranks
held            the objects made of the notebook's values, for values that refer to them
reads           the global names that functions and classes of the rank read
importer        the remote importer: modules from sources that the notebook sent
packages        what can be imported here, for the notebook, which installs what is missing
missing         the name that an exception says is missing
control         the control socket to the agent, with a thread of its own
refusals        what a cell may ask of a notebook and not of a rank: input, debuggers, skymagic itself
spawned         what processes that a cell starts afresh know of the cells
waiting         whether the main thread waits in native code, where it cannot take an interrupt
gpu             the rank's GPU: whose error it is, and memory freed after a failure
post_mortem     the debugger on the frames of the last error
plugin_hooks    the hooks of the pool's plugins, entered in order and left in reverse
own_modules     the modules that the kernel is made of, restored where a cell has removed them
stdio           standard output and error, restored where a cell has broken them
tracebacks      an exception's message and traceback without internal frames
widgets         displays of widgets: as text that changes with them, and relayed to the notebook
comms           the comms of widgets that the notebook shows too
between         what front ends send to widgets, handled between cells
"""
