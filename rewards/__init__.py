# SPDX-License-Identifier: Apache-2.0
"""Visual rewards: one file per judge, a catalogue, composition."""
