// Chat streams a chat with a weft mesh over gRPC: ./chat --model NAME "Why is the sky blue?"
//
// Ctrl-C cancels the request. The exit codes are those of the table in docs/api.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	common "weft/api/common/v1"
	router "weft/api/router/v1"
)

// exitCodes says what the program ends with, by the status of the call; every other failure is 1.
var exitCodes = map[codes.Code]int{
	codes.OK:                0,
	codes.InvalidArgument:   2,
	codes.NotFound:          3,
	codes.DeadlineExceeded:  5,
	codes.Unauthenticated:   6,
	codes.PermissionDenied:  6,
	codes.ResourceExhausted: 7,
	codes.Unavailable:       7,
	codes.Canceled:          130,
}

func main() {
	address := flag.String("address", "127.0.0.1:7070", "`HOST:PORT` of the mesh's gRPC")
	key := flag.String("key", os.Getenv("WEFT_API_KEY"), "API `KEY`; default: $WEFT_API_KEY")
	ca := flag.String("ca", "", "`FILE` with the certificate authority of the mesh")
	model := flag.String("model", "smollm2-135m", "`NAME` of a model, pool, route or agent")
	deadline := flag.Float64("deadline", 60, "`SECONDS` after which the mesh gives up")
	flag.Parse()
	prompt := strings.Join(flag.Args(), " ")
	if prompt == "" || *deadline <= 0 {
		fmt.Fprintln(os.Stderr, "usage: chat [flags] PROMPT")
		flag.PrintDefaults()
		os.Exit(2)
	}
	security, err := channelSecurity(*address, *ca)
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	connection, err := grpc.Dial(*address, security)
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*deadline*float64(time.Second)))
	if *key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+*key)
	}
	trailer, err := chat(ctx, router.NewInferenceServiceClient(connection), *model, prompt)
	cancel()
	release()
	connection.Close()
	if err != nil {
		printFailure(status.Convert(err), trailer)
	}
	code, known := exitCodes[status.Code(err)]
	if !known {
		code = 1
	}
	os.Exit(code)
}

// channelSecurity is plaintext to this machine unless there is a CA file; TLS elsewhere, so that no key travels in the clear.
func channelSecurity(address, ca string) (grpc.DialOption, error) {
	if ca != "" {
		fromFile, err := credentials.NewClientTLSFromFile(ca, "")
		return grpc.WithTransportCredentials(fromFile), err
	}
	if regexp.MustCompile(`^(unix:|localhost:|127\.|\[::1\]:)`).MatchString(address) {
		return grpc.WithInsecure(), nil
	}
	return grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(nil, "")), nil
}

// chat prints the answer as it comes. It returns the trailer, which has the receipt of a call that failed.
func chat(ctx context.Context, client router.InferenceServiceClient, model, prompt string) (metadata.MD, error) {
	stream, err := client.Chat(ctx, &router.ChatRequest{Model: model, Payload: &common.ChatPayload{
		Messages: []*common.ChatMessage{{
			Role:    common.Role_ROLE_USER,
			Content: []*common.ContentPart{{Kind: &common.ContentPart_Text{Text: prompt}}},
		}},
	}})
	if err != nil {
		return nil, err
	}
	// The mesh answers with the request's id before anything else, so that a request that is cancelled has one, too.
	if header, err := stream.Header(); err == nil && len(header.Get("x-request-id")) > 0 {
		fmt.Fprintln(os.Stderr, "request:", header.Get("x-request-id")[0])
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.Trailer(), nil
		}
		if err != nil {
			return stream.Trailer(), err
		}
		for _, event := range response.Events {
			switch {
			case event.GetQueued() != nil:
				fmt.Fprintf(os.Stderr, "waiting, %d in the queue: %s\n", event.GetQueued().Position, event.GetQueued().Reason)
			case event.GetLoading() != nil:
				fmt.Fprintln(os.Stderr, "loading:", event.GetLoading().Stage)
			case event.GetDelta() != nil:
				fmt.Print(event.GetDelta().Text)
			case event.GetFinished() != nil:
				printReceipt(event.GetFinished().Receipt)
			}
		}
	}
}

func printReceipt(receipt *common.Receipt) {
	runner := "no runner"
	if tries := receipt.GetAttempts(); len(tries) > 0 {
		runner = tries[len(tries)-1].Runner
	}
	tokens := ""
	if receipt.GetUsage() != nil {
		tokens = fmt.Sprintf(", %d tokens", receipt.Usage.CompletionTokens)
	}
	fmt.Fprintf(os.Stderr, "\nreceipt: %s %s by %s%s\n", receipt.GetRequestId(), receipt.GetOutcome(), runner, tokens)
}

// printFailure prints the reason, which is in an ErrorInfo among the status's details; where the network failed there is none.
func printFailure(failure *status.Status, trailer metadata.MD) {
	reason, advice := "no reason", ""
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.RetryInfo:
			delay := detail.RetryDelay
			advice = fmt.Sprintf("retry after %g s\n", float64(delay.GetSeconds())+float64(delay.GetNanos())/1e9)
		}
	}
	fmt.Fprintf(os.Stderr, "\nerror: %s (%s): %s\n%s", reason, failure.Code(), failure.Message(), advice)
	if packed := trailer.Get("weft-receipt-bin"); len(packed) > 0 {
		receipt := &common.Receipt{}
		if proto.Unmarshal([]byte(packed[0]), receipt) == nil {
			printReceipt(receipt)
		}
	}
}
