"""The former name of `labeler.messages.shares`, for modules that were written against it."""

from labeler.messages.shares import *  # noqa: F403
