"""The former name of `labeler.messages.rounds`, for modules that were written against it."""

from labeler.messages.polls import *  # noqa: F403
from labeler.messages.rounds import *  # noqa: F403
