"""Tools for tests of scheduling plugins: builders of contexts, and the plugin contract.

`builders` makes contexts and candidates from the fields that a test names. `contract` has a check
for each role of plugin, which the tests of the built-in plugins and `extproc plugin test` run.
`templates` are commented plugin files, which `extproc plugin template` prints.

The names here are public: changes are listed in the changelog.
"""
