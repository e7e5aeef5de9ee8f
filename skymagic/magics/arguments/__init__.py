"""A magic's line becomes a request: tables of options, a reader for each kind of value, all mistakes at once.

Nothing on a line is evaluated. IPython has expanded ``{expr}`` and ``$var`` before; a trailing ``# comment``, quotes
and a trailing ``;`` are understood here. Each ``parse_…`` raises RequestError with every mistake of its line.

readers        the text of a value becomes what a request holds
options        the tables: every option, and each magic's own
reading        a lexer and a parser: a line becomes values by option, mistakes are collected
cell_magics    %sky_pool and %%sky_pool; %%sky_broadcast, %%sky_sh
line_magics    the other magics, one small request each
removed        magics and options that no longer exist, and what replaces them
help           the text of a magic's docstring; completion
"""
