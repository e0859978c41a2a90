"""Trainer of a vision tower in front of a pretrained language model whose weights stay as they are.

Two stages. First the vocabulary of the pictures: vectors for every mark, colour and shape that a picture may show, and rows for
the new tokens, learnt through the frozen language model, with the true content of each picture in the place of a tower. Then a
small vision tower with LLaVA's projector learns to write these vectors from pixels.
"""
