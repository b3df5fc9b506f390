"""The commands of `labeler`, one module per room: each reads options, calls one function, and renders.

A room is loaded when one of its commands is invoked (`workers.commands.catalogue`), and heavy libraries are imported
inside commands, so that `labeler --help`, `labeler status` and `labeler plan` answer at once.
"""
