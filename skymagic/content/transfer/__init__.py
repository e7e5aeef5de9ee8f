"""File transfer between two machines, for both ends: entries, comparison, and changed files.

The messages, and their order, are in `skymagic.wire.files`.

comparing  differences between a folder and a list of entries
folders    folders below a base, opened one by one and never through a link
listing    a source as a list of entries: files, folders and links; which paths are safe
pieces     files as encoded messages; pieces of a large file that are already present
receiving  atomic writes; the record of a synced folder, used to remove old files
"""
