"""A rank: an ipykernel whose namespace, output and errors appear in the notebook as its own.

entry            what a forked process does to become a rank
context          state of kernel, shell and scripts: the control socket to the agent, plugin hooks
kernel           the kernel, which carries out orders and protects them from interrupts
interrupts       SIGINT handling: interrupts reach cells only; detection of waits in native code
shell            IPython's shell: displays go to the agent, errors are returned, streams repaired
namespace        the rank's variables: bind received values, pack values to send back
snapshot         the object of each name when a cell started, without keeping it alive
object_table     objects created from the notebook's values, and global names that code reads
variable_export  variables packed for other ranks, and definitions for processes that a cell spawns
importer         import of modules from sources that the notebook sent; list of installed packages
refusals         requests that only a notebook can serve: input, debuggers, skymagic itself
profiling        torch's profiler around a cell
gpu              the rank's GPU: attribution of errors, and memory freed after a failure
missing          the name or file that a failed cell did not find
tracebacks       an exception's message, its traceback without internal frames, a debugger for it
no_debugger      keeps debugpy out of the process
ipython7         tracebacks and %time of IPython 7, as IPython 8 has them
bars             progress bars of libraries as single lines of text
widgets          displays of widgets as text
"""
