"""The care of homes, of every role: made, keys replaced, journals verified and copied, leftovers removed."""
