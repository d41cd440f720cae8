"""Where endpoints come from: flags, a watched file, host names in DNS.

Lives here: the strict reading of endpoint lists (`endpoint_list`) and the merging of DNS answers into
endpoints (`dns_answers`), both pure. And the shells: the watched file (`file`), the resolver (`dns`)
and the loop that joins them (`static_discovery`).
Must not live here: what an endpoint is worth or whether it answers (scrape, pool).
Driven by: the server, which runs `Discovery.run` in its task group; it writes to the fleet.
"""
