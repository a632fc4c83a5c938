"""The environment of CTranslate2."""
