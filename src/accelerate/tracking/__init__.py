# SPDX-License-Identifier: Apache-2.0
"""Trackers: one file a service."""
