"""The former name of `labeler.messages.proposals`, for modules that were written against it."""

from labeler.messages.proposals import *  # noqa: F403
