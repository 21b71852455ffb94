"""The bodies of the HTTP contract, for the service and its OpenAPI document: one file a resource, as in app/api.

fields.py has the types that bodies are made of, bounds.py the bounds that commands know too; prompts.py has what
every question about a prompt begins with. The document has every model of every file (app/api/document.py).

Numbers that come by the thousand (token ids, hashes) are declared here for the document and for clients,
and never validated one by one by these models: the service cuts them out of the raw body
(app/api/bodies.py) and validates only the small fields. That is why a request with arrays has two classes:
`MatchFields` is what is validated, `MatchRequest` the whole that a sender writes.

Unknown fields are refused everywhere except inside events, where engines add fields with every release, and on the
routes of other systems (compatibility.py), whose routers send what they send.
"""
