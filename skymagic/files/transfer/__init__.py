"""Files and folders from one machine to another, for both ends: a manifest of entries, a comparison, then the files that differ.

The messages, and their order, are in `skymagic.wire.files`.

comparing  what differs in a folder
folders    folders below a base, opened one by one and never through a link
listing    a source as a list of entries: files, folders and links; which paths are safe
pieces     files as encoded messages; what is there already of a large file
receiving  atomic writes; the record of what was brought into a folder, by which it is removed
"""
