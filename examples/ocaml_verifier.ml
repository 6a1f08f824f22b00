(* The half of the verifier that is OCaml: ocaml_verifier.py runs it in the toplevel, sends it one function after the
   other, and reads what became of each. Nothing that a function does can write to that conversation. *)

let nothing = Stdlib.(!) Toploop.toplevel_env (* the toplevel was started with -nopervasives, so no name is in scope *)
open Stdlib

(* All that a function can name: no channel, no file, no exit, and no module that has them. *)
let prelude = {|
external ( + ) : int -> int -> int = "%addint"
external ( - ) : int -> int -> int = "%subint"
external ( * ) : int -> int -> int = "%mulint"
external ( / ) : int -> int -> int = "%divint"
external ( mod ) : int -> int -> int = "%modint"
external ( ~- ) : int -> int = "%negint"
external ( < ) : 'a -> 'a -> bool = "%lessthan"
external ( > ) : 'a -> 'a -> bool = "%greaterthan"
external ( = ) : 'a -> 'a -> bool = "%equal"
let max (a : int) b = if a > b then a else b
let min (a : int) b = if a < b then a else b
let abs a = if a < 0 then -a else a
|}

let parse text = !Toploop.parse_use_file (Lexing.from_string text)

(* Types, compiles and runs a phrase where the names of `scope` are known; the scope that follows. *)
let execute scope phrase =
  Toploop.toplevel_env := scope;
  ignore (Toploop.execute_phrase false Format.err_formatter phrase);
  !Toploop.toplevel_env

let rec apply f = function
  | [] -> string_of_int (Obj.obj f)
  | x :: rest -> apply ((Obj.obj f : int -> Obj.t) x) rest

let judge scope text tests =
  match parse text with
  | [ Parsetree.(Ptop_def [ { pstr_desc = Pstr_value (_, [ _ ]); _ } ]) as definition ] -> (* one, and only that *)
    (match execute scope definition with
     | exception _ -> "type"
     | _ ->
       print_endline "run"; (* from here on the function's own code runs, and may never end *)
       let f = Obj.magic (Toploop.getvalue "f") in
       String.concat " " (List.map (fun arguments -> try apply f arguments with _ -> "exception") tests))
  | _ | exception _ -> "syntax"

(* When they are over, the kernel ends this process: there is no exception that a function could catch. *)
let limit_cpu seconds = ignore Unix.(setitimer ITIMER_PROF { it_interval = 0.; it_value = seconds })

let () =
  let scope = List.fold_left execute nothing (parse prelude) in
  let numbers text = List.map int_of_string (String.split_on_char ' ' text) in
  print_endline "ready";
  while true do
    match List.map numbers (String.split_on_char ';' (read_line ())) with
    | [ length ] :: tests ->
      let text = really_input_string stdin length in
      limit_cpu 0.25;
      let verdict = judge scope text tests in
      limit_cpu 0.;
      print_endline verdict
    | _ -> assert false
  done
