"""The Python face: pools as context managers, lazy functions, and the operators that run them.

compute    Compute, @function, gather, find
calls      lazy calls, and the operators @, >> and &
"""
