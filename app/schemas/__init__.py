"""The bodies of the HTTP contract, shared by the service, its OpenAPI document and the client: one file a resource, as in
app/api; fields.py has the types that they are made of, prompts.py what every question about a prompt begins with.

Numbers that come by the thousand (token ids, hashes) are declared here for the document and for clients,
and never validated one by one by these models: the service cuts them out of the raw body
(app/api/bodies.py) and validates only the small fields. That is why a request with arrays has two classes:
`MatchFields` is what is validated, `MatchRequest` the whole that a sender writes.

Unknown fields are refused everywhere except inside events, where engines add fields with every release, and on the
compatibility routes. Every model in a file here is in the OpenAPI document (app/api/document.py).
"""
