"""The coordinator over HTTP: routes, decisions, the client, and the pages for people."""
