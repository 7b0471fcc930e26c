# SPDX-License-Identifier: Apache-2.0
"""How the models in `assets/` are made: data, training, cards.

It needs all wings; nothing that users run imports it.
"""
