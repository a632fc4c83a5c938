// A streamed chat with a weft mesh over gRPC: ./chat --model NAME "Why is the sky blue?"
//
// Ctrl-C cancels the request. The exit codes are those of the table in docs/api.md.
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/error_details.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <thread>

#include "weft/api/router/v1/inference_service.grpc.pb.h"

using weft::api::common::v1::Receipt;
using weft::api::router::v1::ChatRequest;
using weft::api::router::v1::ChatResponse;
using weft::api::router::v1::InferenceService;

// ExitCode is what the program ends with, by the status of the call.
int ExitCode(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK: return 0;
    case grpc::StatusCode::INVALID_ARGUMENT: return 2;
    case grpc::StatusCode::NOT_FOUND: return 3;
    case grpc::StatusCode::DEADLINE_EXCEEDED: return 5;
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED: return 6;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::UNAVAILABLE: return 7;
    case grpc::StatusCode::CANCELLED: return 130;
    default: return 1;
  }
}

// Flags returns the flags and, as "prompt", the other words. It ends the program where they cannot be used.
std::map<std::string, std::string> Flags(int count, char** words) {
  const char* key = std::getenv("WEFT_API_KEY");
  std::map<std::string, std::string> flags = {{"--address", "127.0.0.1:7070"}, {"--key", key ? key : ""},
                                              {"--ca", ""}, {"--model", "smollm2-135m"}, {"--deadline", "60"}};
  std::string prompt;
  bool usable = true;
  for (int at = 1; at < count; ++at) {
    const std::string word = words[at];
    if (word.rfind("--", 0) != 0) {
      prompt += (prompt.empty() ? "" : " ") + word;
    } else if (flags.count(word) && at + 1 < count) {
      flags[word] = words[++at];
    } else {
      usable = false;
    }
  }
  if (!usable || prompt.empty() || std::atof(flags["--deadline"].c_str()) <= 0) {
    std::cerr << "usage: chat [--address HOST:PORT] [--key KEY] [--ca FILE] [--model NAME] [--deadline SECONDS] PROMPT\n";
    std::exit(2);
  }
  flags["prompt"] = prompt;
  return flags;
}

// Credentials are plaintext to this machine unless there is a CA file; TLS elsewhere, so that no key travels in the clear.
std::shared_ptr<grpc::ChannelCredentials> Credentials(const std::string& address, const std::string& ca) {
  static const std::regex local("^(unix:|localhost:|127\\.|\\[::1\\]:).*");
  if (ca.empty() && std::regex_match(address, local)) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  if (!ca.empty()) {
    std::ifstream file(ca);
    if (!file) {
      std::cerr << "error: cannot read " << ca << "\n";
      std::exit(2);
    }
    options.pem_root_certs = (std::ostringstream() << file.rdbuf()).str();
  }
  return grpc::SslCredentials(options);
}

void PrintReceipt(const Receipt& receipt) {
  const int tries = receipt.attempts_size();
  std::cerr << "\nreceipt: " << receipt.request_id() << " " << weft::api::common::v1::Outcome_Name(receipt.outcome())
            << " by " << (tries ? receipt.attempts(tries - 1).runner() : "no runner");
  if (receipt.has_usage()) std::cerr << ", " << receipt.usage().completion_tokens() << " tokens";
  std::cerr << std::endl;
}

// PrintFailure prints the reason, which is in an ErrorInfo among the status's details; where the network failed there is none.
void PrintFailure(const grpc::Status& status, const grpc::ClientContext& context) {
  google::rpc::Status rich;
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  grpc::ExtractErrorDetails(status, &rich);
  for (const auto& detail : rich.details()) {
    if (!detail.UnpackTo(&info)) detail.UnpackTo(&retry);
  }
  std::cerr << "\nerror: " << (info.reason().empty() ? "no reason" : info.reason()) << " (code " << status.error_code()
            << "): " << status.error_message() << std::endl;
  if (retry.has_retry_delay()) {
    std::cerr << "retry after " << retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9 << " s\n";
  }
  const auto packed = context.GetServerTrailingMetadata().find("weft-receipt-bin");
  Receipt receipt;
  if (packed != context.GetServerTrailingMetadata().end() &&
      receipt.ParseFromArray(packed->second.data(), static_cast<int>(packed->second.size()))) {
    PrintReceipt(receipt);
  }
}

int main(int count, char** words) {
  auto flags = Flags(count, words);
  // Before gRPC starts threads, so that Ctrl-C arrives nowhere but in the thread below.
  sigset_t interrupts;
  sigemptyset(&interrupts);
  sigaddset(&interrupts, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupts, nullptr);

  auto stub = InferenceService::NewStub(
      grpc::CreateChannel(flags["--address"], Credentials(flags["--address"], flags["--ca"])));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(static_cast<int64_t>(1000 * std::atof(flags["--deadline"].c_str()))));
  if (!flags["--key"].empty()) context.AddMetadata("authorization", "Bearer " + flags["--key"]);
  std::thread interrupted([&] {
    int number = 0;
    sigwait(&interrupts, &number);
    context.TryCancel();
  });

  ChatRequest request;
  request.set_model(flags["--model"]);
  auto* message = request.mutable_payload()->add_messages();
  message->set_role(weft::api::common::v1::ROLE_USER);
  message->add_content()->set_text(flags["prompt"]);
  auto reader = stub->Chat(&context, request);
  // The mesh answers with the request's id before anything else, so that a request that is cancelled has one, too.
  reader->WaitForInitialMetadata();
  const auto id = context.GetServerInitialMetadata().find("x-request-id");
  if (id != context.GetServerInitialMetadata().end()) std::cerr << "request: " << id->second << std::endl;
  ChatResponse response;
  while (reader->Read(&response)) {
    for (const auto& event : response.events()) {
      if (event.has_queued()) {
        std::cerr << "waiting, " << event.queued().position() << " in the queue: " << event.queued().reason() << std::endl;
      } else if (event.has_loading()) {
        std::cerr << "loading: " << event.loading().stage() << std::endl;
      } else if (event.has_delta()) {
        std::cout << event.delta().text() << std::flush;
      } else if (event.has_finished()) {
        PrintReceipt(event.finished().receipt());
      }
    }
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) PrintFailure(status, context);
  kill(getpid(), SIGINT);  // Ends the thread that waits for Ctrl-C; to cancel a call that has ended does nothing.
  interrupted.join();
  return ExitCode(status.error_code());
}
