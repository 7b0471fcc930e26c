# SPDX-License-Identifier: Apache-2.0
"""Rules of papers that one calls oneself: tested against the papers, used by no row, trainer or judge.

It may need every room but `objective`; what a row of `NAMED`, a trainer or a judge uses must not come in: it
moves to the room of its subject when it gets its name.
"""
