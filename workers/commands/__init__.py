"""The commands of `labeler`, one module per room: each reads options, calls one function, and renders.

Heavy libraries are imported inside commands, so that `labeler --help` and `labeler plan` answer at once.
"""
