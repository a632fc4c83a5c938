"""A chat template like TranslateGemma's."""

TRANSLATION_TEMPLATE = """\
{%- set languages = {'en': 'English', 'nl': 'Dutch', 'fr': 'French', 'pt-BR': 'Brazilian Portuguese'} -%}
{{ bos_token }}
{%- for message in messages -%}
{%- if message.content is string or message.content | length != 1 -%}
{{ raise_exception('a message must have one part') }}
{%- endif -%}
{%- set part = message.content[0] -%}
{%- if part['source_lang_code'] not in languages or part['target_lang_code'] not in languages -%}
{{ raise_exception('the language is not known') }}
{%- endif -%}
{{ languages[part['source_lang_code']] }} to {{ languages[part['target_lang_code']] }}: {{ part['text'] }}
{%- endfor -%}
"""
