"""HTTP: sockets, connections, bodies, the application, and its handlers.

A request's way in, and the value that each room adds:

    inflow, connections    bytes, in slices and within bounds
    server, app            an `Exchange`: id, bytes of the budget, headers of the answer
    handlers.entry         a `Caller` (sender, headers), the body, an `Arrival` (until it is queued)
    requests.service       a prompt's tokens and its place in the order, then `Generations`

The answer goes back through `Exchange.answer`: whole, or as an `EventStream`.
"""
