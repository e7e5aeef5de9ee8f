"""A rank: an ipykernel whose namespace, output and errors the notebook sees as its own.

entry         what a forked process does to become a rank
context       the state that kernel, shell and scripts share: the control socket to the agent, the plugins' hooks
kernel        the kernel: carries out orders, between interrupts
interrupts    what SIGINT does: it falls into cells alone, and not into a wait in native code
shell         IPython's shell: displays go by way of the agent, errors are returned; what a cell has broken is put back
namespace     the rank's variables: values are bound, and packed for the way back
snapshot      which object each name had when a cell began, without keeping it alive
held          the objects made of the notebook's values, and the global names that code of the rank reads
lending       the rank's own values for other ranks, and for processes that a cell starts afresh
importer      the remote importer: modules from sources that the notebook sent; what can be imported here
refusals      what a cell may ask of a notebook and not of a rank: input, debuggers, skymagic itself
profiling     torch's profiler around a cell
gpu           the rank's GPU: whose error it is, and memory freed after a failure
missing       the name or file that a failed cell has looked for in vain
tracebacks    an exception's message, its traceback without internal frames, and the debugger on it
bars          libraries' progress bars as text in one line
widgets       displays of widgets as text
"""
