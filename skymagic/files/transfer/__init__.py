"""Files and folders from one machine to another, for both ends: a manifest of entries, a comparison, then the files that differ.

The messages, and their order, are in `skymagic.wire.files`.

entries    files, folders and links as values; which paths are safe
listing    a source as a list of entries
receiving  comparison with a folder, atomic writes, the mirror's record
sending    files as encoded messages
"""
