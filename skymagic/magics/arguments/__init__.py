"""Parse a magic's line to a request: tables of options, a reader for each kind of value.

Nothing on a line is evaluated. IPython has already expanded ``{expr}`` and ``$var``; a trailing ``#
comment``, quotes and a trailing ``;`` are handled here. Each ``parse_…`` raises RequestError with
every mistake of its line.

readers        convert the text of a value to the field of a request
options        the tables: every option, and each magic's options
parsing        lexer and parser: convert a line to values by option, and collect mistakes
cell_magics    %sky_pool and %%sky_pool; %%sky_broadcast, %%sky_sh
line_magics    the other magics, one small request each
removed        magics and options that no longer exist, and their replacements
help           help text of a magic, used as its docstring; completion
"""
