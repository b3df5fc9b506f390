"""Messages in transit, work with leases, progress: what a mailbox is, and its two twins. Nothing here is the truth.

`protocol` says what every mailbox keeps; `redis` is the one among processes, `memory` the one inside a process. This
package's root loads neither, so that whoever only takes a mailbox loads no client library.
"""

from feature_store.mailbox.protocol import MAX_MAIL_BYTES, Letter, Mailbox, Work

__all__ = ["MAX_MAIL_BYTES", "Letter", "Mailbox", "Work"]
