"""The former name of `labeler.messages.body_format`, for modules that were written against it."""

from labeler.messages.body_format import *  # noqa: F403
