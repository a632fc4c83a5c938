// A streamed chat with a weft mesh over gRPC: node chat.mjs --model NAME "Why is the sky blue?"
//
// Ctrl-C cancels the request. The exit codes are those of the table in docs/api.md.
// @ts-check
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import * as grpc from '@grpc/grpc-js';
import * as protoLoader from '@grpc/proto-loader';

/** @typedef {import('./generated/inference_service').ProtoGrpcType} Services */
/** @typedef {import('./generated/weft/api/common/v1/Receipt').Receipt__Output} Receipt */
/** @typedef {import('./generated/google/rpc/Status').Status__Output} RichStatus */
/** @typedef {import('./generated/google/rpc/ErrorInfo').ErrorInfo__Output} ErrorInfo */
/** @typedef {import('./generated/google/rpc/RetryInfo').RetryInfo__Output} RetryInfo */

const { values: flags, positionals } = flagsOfCommandLine();
const PROTO_FILES = ['weft/api/router/v1/inference_service.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'];
const definitions = protoLoader.loadSync(PROTO_FILES, {
  includeDirs: [flags.protos, new URL('../protos', import.meta.url).pathname],
  longs: Number, enums: String, defaults: true, oneofs: true,
});
const services = /** @type {Services} */ (/** @type {unknown} */ (grpc.loadPackageDefinition(definitions)));

/** What the program ends with, by the status of the call; every other failure is 1. */
const EXIT_CODES = new Map([
  [grpc.status.OK, 0],
  [grpc.status.INVALID_ARGUMENT, 2],
  [grpc.status.NOT_FOUND, 3],
  [grpc.status.DEADLINE_EXCEEDED, 5],
  [grpc.status.UNAUTHENTICATED, 6],
  [grpc.status.PERMISSION_DENIED, 6],
  [grpc.status.RESOURCE_EXHAUSTED, 7],
  [grpc.status.UNAVAILABLE, 7],
  [grpc.status.CANCELLED, 130],
]);

const metadata = new grpc.Metadata();
if (flags.key) metadata.set('authorization', `Bearer ${flags.key}`);
const client = new services.weft.api.router.v1.InferenceService(flags.address, channelCredentials());
const request = {
  model: flags.model,
  payload: { messages: [{ role: /** @type {const} */ ('ROLE_USER'), content: [{ text: positionals.join(' ') }] }] },
};
const call = client.chat(request, metadata, { deadline: Date.now() + 1000 * Number(flags.deadline) });
process.on('SIGINT', () => call.cancel());
// The mesh answers with the request's id before anything else, so that a request that is cancelled has one, too.
call.on('metadata', (answered) => console.error(`request: ${answered.get('x-request-id')}`));
call.on('data', (/** @type {import('./generated/weft/api/router/v1/ChatResponse').ChatResponse__Output} */ response) => {
  for (const event of response.events) {
    if (event.queued) console.error(`waiting, ${event.queued.position} in the queue: ${event.queued.reason}`);
    else if (event.loading) console.error(`loading: ${event.loading.stage}`);
    else if (event.delta) process.stdout.write(event.delta.text);
    else if (event.finished?.receipt) printReceipt(event.finished.receipt);
  }
});
call.on('error', () => undefined); // The status says the same.
call.on('status', (status) => {
  if (status.code !== grpc.status.OK) printFailure(status);
  process.exitCode = EXIT_CODES.get(status.code) ?? 1;
  client.close();
});

function flagsOfCommandLine() {
  try {
    const parsed = parseArgs({
      allowPositionals: true,
      options: {
        address: { type: 'string', default: '127.0.0.1:7070' },
        key: { type: 'string', default: process.env.WEFT_API_KEY ?? '' },
        ca: { type: 'string', default: '' },
        model: { type: 'string', default: 'smollm2-135m' },
        deadline: { type: 'string', default: '60' },
        protos: { type: 'string', default: new URL('../../../protos', import.meta.url).pathname },
      },
    });
    if (parsed.positionals.length > 0 && Number(parsed.values.deadline) > 0) return parsed;
  } catch (error) {
    console.error(String(error));
  }
  console.error('usage: node chat.mjs [--address HOST:PORT] [--key KEY] [--ca FILE] [--model NAME] [--deadline SECONDS] PROMPT');
  process.exit(2);
}

/** Plaintext to this machine unless there is a CA file; TLS elsewhere, so that no key travels in the clear. */
function channelCredentials() {
  if (flags.ca) return grpc.credentials.createSsl(readFileSync(flags.ca));
  const isLocal = /^(unix:|localhost:|127\.|\[::1\]:)/.test(flags.address);
  return isLocal ? grpc.credentials.createInsecure() : grpc.credentials.createSsl();
}

/** @param {Receipt} receipt */
function printReceipt(receipt) {
  const tokens = receipt.usage ? `, ${receipt.usage.completionTokens} tokens` : '';
  console.error(`\nreceipt: ${receipt.requestId} ${receipt.outcome} by ${receipt.attempts.at(-1)?.runner || 'no runner'}${tokens}`);
}

/** The reason is in an ErrorInfo among the status's details; where the network failed there is none. @param {grpc.StatusObject} status */
function printFailure(status) {
  const rich = /** @type {RichStatus | undefined} */ (decoded('google.rpc.Status', status.metadata.get('grpc-status-details-bin')[0]));
  const details = new Map(rich?.details?.map((detail) => [detail.type_url.split('/').pop(), detail.value]));
  const info = /** @type {ErrorInfo | undefined} */ (decoded('google.rpc.ErrorInfo', details.get('google.rpc.ErrorInfo')));
  const retry = /** @type {RetryInfo | undefined} */ (decoded('google.rpc.RetryInfo', details.get('google.rpc.RetryInfo')));
  console.error(`\nerror: ${info?.reason ?? 'no reason'} (${grpc.status[status.code]}): ${status.details}`);
  if (retry?.retryDelay) console.error(`retry after ${retry.retryDelay.seconds + retry.retryDelay.nanos / 1e9} s`);
  const receipt = /** @type {Receipt | undefined} */ (decoded('weft.api.common.v1.Receipt', status.metadata.get('weft-receipt-bin')[0]));
  if (receipt) printReceipt(receipt);
}

/** @param {string} name @param {grpc.MetadataValue | undefined} bytes */
function decoded(name, bytes) {
  if (!Buffer.isBuffer(bytes)) return undefined;
  return /** @type {protoLoader.MessageTypeDefinition<object, object>} */ (definitions[name]).deserialize(bytes);
}
