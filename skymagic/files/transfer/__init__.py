"""Files and folders from one machine to another: what lies there, what differs, bytes out, bytes in; for both ends of a line.

entries     what travels: files, folders, links; which paths may
listing     a source as entries
framing     headers and bytes on a pair of streams
sending     files as frames
receiving   frames as files: compared first, written beside, renamed when whole
"""
