"""Reads configuration files and flags, checks them, and builds the parts of an endpoint picker.

- `settings` and `pool_sections` hold the frozen sections, with units and defaults.
- `validation` has the ranges of fields, and converts plain trees to structs, with errors that name
  the path; `loader` reads files and flags; `lint` warns of settings that are probably a mistake.
- `epp_config` reads the file of the upstream EPP, whose types `epp_plugin_types` lists;
  `epp_sections`, `epp_data_layer`, `epp_sources`, `epp_sessions` and `epp_kv_events` read its parts
  without a profile. Its profiles and ours become a `ProfileSpec`, from which `profile_builder` builds
  the scheduling profile; `filter_tree_syntax` converts filter trees, `plugin_loader` adds plugins from
  files and installed packages.
- `factory` builds the parts of an endpoint picker from settings.

The package opens no sockets, starts no tasks, reads no clock and parses no command line.
"""
