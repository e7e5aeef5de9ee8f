"""Files and folders from one machine to another, for both ends: a manifest of entries, a comparison, then the files that differ.

The messages, and their order, are in `skymagic.wire.files`.

entries    files, folders and links as values; which paths are safe
folders    folders below a base, opened one by one and never through a link
listing    a source as a list of entries
mirror     the record of what was brought into a folder, by which it is removed
pieces     what is there already of a large file
receiving  comparison with a folder, atomic writes
sending    files as encoded messages
"""
