"""The policies: one file each, frozen parameters and one pure step.

A policy sees neither its caller nor other policies; `extproc.autoscaling.policy_runner` lists them.
"""
