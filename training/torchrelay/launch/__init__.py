"""The launcher: one generation of rank processes on this host, from winning it to the last word about it. No torch, no orchestrator.

``python -m torchrelay.launch`` reads one request line on stdin and writes events as JSON lines on stdout, the last of them the outcome. The end of
stdin means that the parent is gone; like SIGTERM it is answered with a save, a commit and a clean exit.
"""
